"""Parts of another package: an engine and a transport."""
