"""What is written for TensorBoard, in its own protocol buffers. No torch."""
