"""The command line and what it runs: tasks, runs, plans and reports. It imports the library; nothing imports it."""
