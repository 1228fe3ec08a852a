"""Module entry point, `python -m decoupled_diloco.cli`: how `diloco up` starts its processes."""

from .commands import main

if __name__ == "__main__":
    main()
