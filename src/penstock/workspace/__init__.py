"""Durable jobs: a job is a folder, and where the folder lies is its state. Files only; models are elsewhere."""
