"""The processes of a run: started, signalled, and ended without orphans."""
