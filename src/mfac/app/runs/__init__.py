"""Runs: what a command does to a task, saved in a folder as it goes, so that it can be stopped and go on."""
