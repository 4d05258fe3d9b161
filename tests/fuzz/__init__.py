"""Fuzzing of everything that reads what others wrote. `make fuzz` runs it for an hour; test_fuzz.py runs each target briefly."""
