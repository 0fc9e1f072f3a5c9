// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

import "os"

const seekHole = 4

// allocated returns the length of the part of a file, from its beginning, for which the
// disk has space. After a crash a file may be longer than that.
func allocated(f *os.File) (int64, error) {
	end, err := f.Seek(0, 2)
	if err != nil || end == 0 {
		return end, err
	}
	if hole, err := f.Seek(0, seekHole); err == nil {
		return hole / 512 * 512, nil
	}
	return end, nil // the file system does not know
}
