from kvsidecar.cli.main import main

main(prog_name="kvsidecar")
