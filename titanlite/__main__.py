"""Run `python -m titanlite`, which is the `titanlite` command."""

from titanlite.launch.safe_path import leave_working_directory

if __name__ == "__main__":
    leave_working_directory()  # before the imports below could find something there
    from titanlite.launch.cli import main

    main()
