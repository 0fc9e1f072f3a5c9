// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package fleet

func asProcess() (status int, is bool) { return 0, false }
