"""Single-device layers with full semantics: the mathematics that no mechanism may change."""
