"""The Thinking Language: parser, printer, checker, expander and interpreter. Knows no target."""
