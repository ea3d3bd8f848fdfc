"""What is learnt from: texts, images, and the order in which they come."""
