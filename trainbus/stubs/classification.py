"""Classify images. The data is a folder that has one folder of images for each class."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, interpolate

from trainbus import Task

SIZE = 64  # pixels: every image is scaled to this height and width


class Classifier(Task):
    kind = "classification"  # an evaluation adds accuracy, macro_f1, auc and calibration_error

    def __init__(self, lr=1e-3):  # --param lr=0.01
        self.lr = lr

    def model(self):
        # Your network: images [n, 3, SIZE, SIZE] -> logits [n, classes].
        return nn.Sequential(
            *(nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            nn.Linear(64, len(self.classes)),
        )

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=self.lr)

    def decode(self, sample):
        image, label = super().decode(sample)  # float32 [channels, height, width] from 0 to 1, and an index
        colours = image.expand(3, -1, -1)
        return interpolate(colours[None], size=(SIZE, SIZE), mode="bilinear", antialias=True)[0], label

    def augment(self, example, rng):
        # Your augmentation, of training samples alone.
        image, label = example
        return (image.flip(-1) if rng.random() < 0.5 else image), label

    def loss(self, model, batch):
        images, labels = batch
        return cross_entropy(model(images), labels)

    def metrics(self, model, batch):
        images, labels = batch
        logits = model(images)
        return {"loss": cross_entropy(logits, labels, reduction="none"), "accuracy": logits.argmax(1) == labels}

    def predict(self, model, batch):
        images, labels = batch
        probabilities = model(images).softmax(1)
        return {"prediction": probabilities.argmax(1), "target": labels, "probabilities": probabilities}
