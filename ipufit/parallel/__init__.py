"""Models over several IPUs: which part of a module is on which."""
