"""The processes of a run: started, signalled, stopped, and left without orphans."""
