"""Child processes, and how they are spoken with: frames on a socket, or lines.

`frames` is for processes that run trioserve, `lines` for all other programs. What comes from a
process is bounded and never executed: a stranger's file may have taken it over. Nothing is imported
here, so that a small process has no more of the package than it needs.
"""
