"""The commands that do not train; no module outside this folder imports one. A command imports torch only after it has
parsed its arguments, since --help and wrong arguments should not take the seconds of that import."""
