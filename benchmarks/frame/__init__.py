"""What every benchmark needs: samples in, bars out, a record of the machine, a page."""
