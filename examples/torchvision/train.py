"""Fine-tune MobileNetV2 on images in class folders, ``data/train`` and ``data/val``. It knows nothing of trainbus."""

import argparse
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.models import mobilenet_v2

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, default=Path("data"))
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--weights", type=Path, help="a state_dict to begin with; its head is not used")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--size", type=int, default=224)
parser.add_argument("--lr", type=float, default=1e-3)
args = parser.parse_args()

prepare = transforms.Compose([transforms.Resize((args.size, args.size)), transforms.ToTensor()])
train, val = (ImageFolder(args.data / split, prepare) for split in ("train", "val"))
assert train.classes == val.classes
model = mobilenet_v2(weights=None, num_classes=len(train.classes))
if args.weights is not None:
    weights = torch.load(args.weights)
    model.load_state_dict({k: v for k, v in weights.items() if not k.startswith("classifier.1.")}, strict=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
last, done = args.out / "last.pt", 0
if last.exists():
    state = torch.load(last)
    model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])
    done = state["epoch"]

for epoch in range(done + 1, args.epochs + 1):
    model.train()
    losses = []
    for images, labels in DataLoader(train, batch_size=32, shuffle=True):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        right = sum((model(images).argmax(1) == labels).sum().item() for images, labels in DataLoader(val, 32))
    print(f"epoch {epoch}: loss={sum(losses) / len(losses):.4f} accuracy={right / len(val):.4f}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, args.out / "new.pt")
    (args.out / "new.pt").replace(last)
