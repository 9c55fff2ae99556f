"""Pure decisions: settings and a machine in, a launch plan out."""
