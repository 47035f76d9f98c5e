"""The pages, and in build/ the scripts that write some of them."""
