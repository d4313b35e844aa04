"""What a run shows of itself: traces, time accounting, metrics, logs, the report and the terminal view.

Nothing here decides anything: switched off, a run does exactly the same.
"""
