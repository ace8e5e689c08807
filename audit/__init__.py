"""What is said of a classifier: data, metrics, teachers, verdict, gate, debiasing."""
