"""Measuring trioserve, and any other server that speaks the same HTTP, from the outside.

`proof` runs the table of `rows`, each with its target; `pair` has drafts, `gpu` a GPU, `trace` the
parts of a request, and `gguf_maker` writes models of any size to do it with. The situations are in
`scenarios`, `many`, `chats` and `cancel`. Below them: `http1` reads responses, `driver` takes many
clients through their plans on one selector, `wire` knows the bodies of the two APIs, `servers`
starts and stops servers and reads their resources, and `stats`, `report` and `pictures` make
numbers, tables and pictures, with `trioserve.bench`.
"""
