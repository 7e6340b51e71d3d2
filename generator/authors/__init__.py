"""Authors: what proposes sketches and code for a spec."""
