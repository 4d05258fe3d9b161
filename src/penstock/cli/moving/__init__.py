"""Commands for people who come from another system."""
