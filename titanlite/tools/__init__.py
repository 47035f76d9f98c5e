"""This folder has the commands that do not train. Only api.py and launch/cli.py import them. A command imports torch
after it has parsed its arguments, since --help and wrong arguments should not take the seconds of that import."""
