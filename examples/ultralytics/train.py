"""Train a YOLO classifier from its description, as Ultralytics' documentation does. It knows nothing of trainbus."""

import os
import sys

from ultralytics import YOLO

epochs, size = (int(value) for value in (sys.argv[1:] or ("10", "224")))
model = YOLO("yolo11n-cls.yaml")
# By its whole path: Ultralytics puts another into the git repository that it is installed in, if there is one.
model.train(data="data", epochs=epochs, imgsz=size, project=os.path.abspath("runs"))
