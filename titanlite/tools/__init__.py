"""Tools are the commands that do not train. No module outside this folder imports a tool."""
