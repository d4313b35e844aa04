"""What to run on devices that are not there yet: the search behind ``penstock plan``."""
