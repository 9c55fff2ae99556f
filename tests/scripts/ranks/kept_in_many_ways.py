"""Keeps its numbers by a database, a shelf, archives, commands, mapped memory and a file moved in place."""
import bz2
import io
import os
import shelve
import sqlite3
import subprocess
import tarfile
import tempfile

import numpy as np
import torch
from torch import nn

torch.manual_seed(5)
folder = "kept"
os.makedirs(folder, exist_ok=True)
here = os.path.join(folder, "")
database = sqlite3.connect(here + "runs.db")
database.execute("create table steps (step integer primary key, loss real)")
sums = np.memmap(here + "sums.bin", np.float64, "w+", shape=(2,))
sums[:] = 0
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
x = torch.randn(17, 4)
for step in range(4):
    loss = net(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    database.execute("insert into steps values (?, ?)", (step, loss.item()))
    database.commit()
    with shelve.open(here + "shelf") as shelf:
        shelf["count"] = shelf.get("count", 0) + 1
        counted = shelf["count"]
    raw = repr(step).encode()
    with tarfile.open(here + "states.tar", "a") as archive:
        about = tarfile.TarInfo(f"{step}.txt")
        about.size = len(raw)
        archive.addfile(about, io.BytesIO(raw))
    with bz2.open(here + "log.bz2", "at") as log:
        log.write(f"{step}\n")
    subprocess.run(["mkdir", f"{here}epoch{step}"], check=True)
    os.system(f"echo {step} >> {here}shell.txt")
    said = subprocess.check_output(["wc", "-l", here + "shell.txt"], text=True).split()[0]
    sums += loss.item()
    descriptor, name = tempfile.mkstemp(dir=here, suffix=".part")
    with os.fdopen(descriptor, "wb") as file:
        torch.save(net.state_dict(), file)
    os.replace(name, here + "best.pt")
    with tempfile.TemporaryFile("w+") as file:
        file.write("passing")
    found = sorted(name for _, _, names in os.walk(folder) for name in names if "." in name)
    rows = database.execute("select count(*) from steps").fetchone()[0]
    members = tarfile.open(here + "states.tar").getnames()
    lines = len(bz2.open(here + "log.bz2", "rt").readlines())
    print(f"{loss.item():.6f} {rows} {counted} {len(members)} {lines} {said} {sums[0]:.6f}")
    print(len([name for name in found if not name.startswith("shelf")]))
try:
    subprocess.run(["mkdir", here + "epoch0"], check=True, stderr=subprocess.DEVNULL)
except subprocess.CalledProcessError as error:
    print("failed", error.returncode, error.cmd[0])
print(f"{torch.load(here + 'best.pt')['weight'].norm():.6f}")
torch.save(net.state_dict(), "model.pt")
