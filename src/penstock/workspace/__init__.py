"""Durable jobs: each job is a folder, and the place of the folder is its state. Knows files, not models."""
