"""Commands that run before training: init, inspect, check, fit, vocabulary, histories."""
