"""One process for each GPU, which moves its bytes: its context, the engines' memory that it imports, its mapping of the
pool, its streams.

Imports `pool`, `device` and `support`. In the daemon: `copiers` supervises the processes, `link` speaks with one,
`pins_in_copiers` pins the pool in all. In a copier: `process` is the program, `copy_queue` keeps one direction of the
link busy, `recipes` and `copy_plan` turn blocks into driver calls. Between them: `ring`, `messages`, `control`.
"""

PROGRAM = "kvsidecar.copier.process"
