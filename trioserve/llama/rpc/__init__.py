"""Other machines that compute a part of the model, through ggml's RPC backend.

`library` compiles and loads that backend, and gives llama.cpp the machines that `--rpc` names.
`peers` checks each of them before: ggml aborts the process when a machine does not answer as it
expects. For the same reason all of this belongs into a process that may end: the command starts
one for the model, and starts it again. `serving` is the other machine's side.
"""
