"""Figures: every function takes tables or arrays and gives a matplotlib figure, to be shown or saved by the caller.

`look`, `figure`, `panels` and `axes` are what all share; each other file draws one subject.
"""
