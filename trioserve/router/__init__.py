"""Many models behind one address: each runs in a process of its own, which is started on demand.

`Fleet` has the processes. What runs, what waits and what has to give way is decided in `schedule`,
without a clock or a process. `child` is one process from its start to its end, `launch` has the two
ways to start one, and `zygote` runs in the process that the second way forks. `forward`
takes a request to a process, and brings back the answer. `remote` is for programs: models in
processes, used as a `Server` is.
"""
