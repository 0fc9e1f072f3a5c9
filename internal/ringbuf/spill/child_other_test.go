// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build !linux || !amd64

package spill

import "errors"

var errOther = errors.New("LEFT OUT: written for Linux on amd64")

func faultChild() error { return errOther }
func traceChild() error { return errOther }
