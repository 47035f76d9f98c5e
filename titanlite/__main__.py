"""Run `python -m titanlite`, which is the `titanlite` command."""

from titanlite.launch.cli import main

if __name__ == "__main__":
    main()
