"""`python -m decoupled_diloco.cli`: the `diloco` command; `diloco up` starts its processes in this way."""

from .commands import main

if __name__ == "__main__":
    main()
