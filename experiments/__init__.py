"""The paper's experiments as recipes: `python -m experiments.<recipe>`. They import mfac; nothing imports them."""
