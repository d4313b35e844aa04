"""An engine that generates nothing: it answers with the responses that the rows of the dataset hold."""
