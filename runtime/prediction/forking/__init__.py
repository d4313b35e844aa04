"""A recorded run, gone on with by simulation from one of its steps: ``penstock replay RUN --fork``."""
