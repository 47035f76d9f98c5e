"""Run `python -m titanlite`, which is the `titanlite` command."""

from titanlite.launch.safe_path import leave_working_directory

if __name__ == "__main__":
    leave_working_directory()  # modules in the working directory could shadow the imports below
    from titanlite.launch.cli import main

    main()
