"""A learner spread over processes: what they are to each other, how they are started, and how they end together."""
