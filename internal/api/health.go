package api

import (
	"net/http"

	"github.com/labstack/echo/v4"
)

// Livez implements GET /livez: the process answers. Whether it can do anything is for /readyz to say; restarting a process whose database
// is away would help nobody.
func (s *Server) Livez(c echo.Context) error {
	return c.JSONBlob(http.StatusOK, []byte(`{"status":"alive"}`))
}

// Readyz implements GET /readyz: whether this replica should be sent requests.
func (s *Server) Readyz(c echo.Context) error {
	if err := s.Ready(c.Request().Context()); err != nil {
		return err
	}
	return c.JSONBlob(http.StatusOK, []byte(`{"status":"ready"}`))
}
