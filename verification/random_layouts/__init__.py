"""Random layouts: configs drawn within the rules, each compared with the single-process reference, and configs drawn
without regard to the rules, each of which must be accepted or rejected in a line."""
