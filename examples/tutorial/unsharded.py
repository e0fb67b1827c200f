"""The script to begin with: one process, nothing sharded."""

import torch
from model import Model, batch_of, loss_of

torch.manual_seed(0)
model = Model()
optim = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(8):
    tokens = batch_of(step)
    loss = loss_of(model(tokens), tokens)
    loss.backward()
    optim.step()
    optim.zero_grad()
    print(f"step {step}  loss {loss.item():.4f}")
