// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package chaosrun

import "errors"

type disk struct{ at string }

func newDisk(string) (*disk, error) {
	return nil, errors.New("chaos: a disk to fill needs Linux")
}

func (*disk) fill() (kib int, err error) { return 0, nil }
func (*disk) free() error                { return nil }
func (*disk) close() error               { return nil }
