"""What the checker checks, one concern a file. `generator.tl.checker` calls them and puts the findings together."""
