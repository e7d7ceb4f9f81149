from kvsidecar.cli import main

main(prog_name="kvsidecar")
