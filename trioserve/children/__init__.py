"""Child processes, and how they are spoken with: frames on a socket, or lines.

`frames` is for processes that run trioserve, `lines` for all other programs. `child` and `inside`
are both sides of a small program that does one thing. `launch` starts whole servers, as forks of a
`zygote`, which send `reports` to their `parent`.

What comes from a process is bounded and never executed: a stranger's file may have taken it over.
Nothing is imported here, so that a small process has no more of the package than it needs.
"""
