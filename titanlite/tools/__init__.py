"""Tools are the commands that do not train. Nothing outside this folder imports them."""
