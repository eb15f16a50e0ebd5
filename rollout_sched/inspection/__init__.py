"""What a journal tells, of a live run or a replayed one: figures, a trace, a timeline."""
